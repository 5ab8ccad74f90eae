// What this machine can do at most: reading memory with all cores, and multiplying and adding.
// Prints one line of JSON. A kind of number that the CPU has no instruction for is left out.

#include <omp.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int WIDTH = 64;
#elif defined(__AVX__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

typedef float Floats __attribute__((vector_size(WIDTH), aligned(4)));

constexpr int LANES = WIDTH / 4;
constexpr int CHAINS = 12;  // more than the latency of a multiply-add times two units
constexpr long ROUNDS = 20'000'000;
constexpr int TRIES = 5;

static volatile float sink;
static volatile float nothing = 0;

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Chains that start with numbers unknown to the compiler: it would compute equal ones only once.
template <typename Vector>
static void begin(Vector* sums) {
    float start[LANES];
    for (int chain = 0; chain < CHAINS; chain++) {
        for (int lane = 0; lane < LANES; lane++) start[lane] = nothing;
        memcpy(&sums[chain], &start, sizeof start);
    }
}

template <typename Vector>
static float total(const Vector* sums) {
    float values[CHAINS * LANES], sum = 0;
    memcpy(values, sums, sizeof values);
    for (float value : values) sum += value;
    return sum;
}

// The best of several tries, in units per second of all threads together.
template <typename Work>
static double best(double units_per_thread, Work work) {
    double seconds = 1e30;
    for (int attempt = 0; attempt < TRIES; attempt++) {
        double began = now();
#pragma omp parallel
        work();
        double took = now() - began;
        if (took < seconds) seconds = took;
    }
    return units_per_thread * omp_get_max_threads() / seconds;
}

static double read_rate() {
    const size_t bytes = (size_t(1) << 30) / omp_get_max_threads() / 4096 * 4096;
    std::vector<char*> parts(omp_get_max_threads());
    // Each thread touches its own part first, so that it lies near to that thread.
#pragma omp parallel
    {
        char*& part = parts[omp_get_thread_num()];
        part = new char[bytes];
        memset(part, 0, bytes);
    }
    double rate = best(double(bytes), [&] {
        const Floats* part = reinterpret_cast<const Floats*>(parts[omp_get_thread_num()]);
        Floats sums[8] = {};
        for (size_t place = 0; place + 8 <= bytes / WIDTH; place += 8)
            for (int one = 0; one < 8; one++) sums[one] += part[place + one];
        Floats sum = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
        sink = sum[0];
    });
    for (char* part : parts) delete[] part;
    return rate;
}

static double float32_rate() {
    return best(2.0 * ROUNDS * CHAINS * LANES, [] {
        Floats sums[CHAINS];
        begin(sums);
        Floats factor, more;
        for (int lane = 0; lane < LANES; lane++) factor[lane] = 0.5f, more[lane] = 1.0f;
        for (long round = 0; round < ROUNDS; round++)
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++)
                sums[chain] = sums[chain] * factor + more;
        sink = total(sums);
    });
}

#ifdef __AVX512BF16__
static double bfloat16_rate() {
    return best(2.0 * ROUNDS * CHAINS * 32, [] {
        __m512 sums[CHAINS];
        begin(sums);
        __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
        for (long round = 0; round < ROUNDS; round++)
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++)
                sums[chain] = _mm512_dpbf16_ps(sums[chain], one, one);
        sink = total(sums);
    });
}
#endif

#ifdef __AVX512VNNI__
static double int8_rate() {
    return best(2.0 * ROUNDS * CHAINS * 64, [] {
        __m512i sums[CHAINS];
        begin(sums);
        __m512i one = _mm512_set1_epi8(1);
        for (long round = 0; round < ROUNDS; round++)
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++)
                sums[chain] = _mm512_dpbusd_epi32(sums[chain], one, one);
        sink = total(sums);
    });
}
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Linux gives tiles to a process that asks for them.
static bool has_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

struct alignas(64) TileConfig {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four sums of the products of two tiles with two others, all zeros. A product takes in 64 bytes of
// each row: `depth` numbers.
template <bool WHOLE>
static double tile_rate(int depth) {
    return best(2.0 * ROUNDS * 16 * 16 * depth, [] {
        static const TileConfig config;
        _tile_loadconfig(&config);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
        for (long round = 0; round < ROUNDS / 4; round++) {
            if constexpr (WHOLE) {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_release();
    });
}
#else
static bool has_tiles() { return false; }
template <bool WHOLE>
static double tile_rate(int) { return 0; }
#endif

// With "read" only how fast memory is read.
int main(int count, char** words) {
    printf("{\"read_gb_s\": %.2f", read_rate() / 1e9);
    if (count > 1 && strcmp(words[1], "read") == 0) {
        printf("}\n");
        return 0;
    }
    [[maybe_unused]] const bool tiles = has_tiles();
    printf(", \"gflops\": {");
#ifdef __AVX512BF16__
    printf("\"bfloat16\": %.1f, ", (tiles ? tile_rate<false>(32) : bfloat16_rate()) / 1e9);
#endif
#ifdef __AVX512VNNI__
    printf("\"int8\": %.1f, ", (tiles ? tile_rate<true>(64) : int8_rate()) / 1e9);
#endif
    printf("\"float32\": %.1f}}\n", float32_rate() / 1e9);
}
