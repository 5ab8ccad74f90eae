// How attention is divided among threads: tokens into runs and, where there are too few of them, what a run
// sees into segments.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention_step.hpp"

namespace {

// Fewer pieces per thread would leave threads idle at the end.
constexpr int64_t PIECES = 4;

// Consecutive tokens of one user.
struct Run {
  int64_t first, last;
};

// Query rows per piece: the best number of the level, or fewer if threads would get too few pieces.
int64_t rows_of_piece(const Step& step) {
  constexpr int64_t FEWEST = 64;
  const int64_t best = glm::level().query_rows(step.caches.kind);
  const int64_t all = step.tokens * step.group * step.kv_heads;
  return std::clamp<int64_t>(all / (PIECES * glm::threads()) / FEWEST * FEWEST, FEWEST, best);
}

std::vector<Run> runs_of(const Step& step) {
  std::vector<Run> runs;
  const int64_t most = std::max<int64_t>(1, rows_of_piece(step) / step.group);
  for (int64_t t = 0; t < step.tokens; ++t) {
    const bool continues = !runs.empty() && step.users[t - 1] == step.users[t] &&
                         t - runs.back().first < most;
    if (continues) {
      runs.back().last = t + 1;
    } else {
      runs.push_back({t, t + 1});
    }
  }
  return runs;
}

bool is_one_run_per_user(const Step& step, const std::vector<Run>& runs) {
  std::vector<int32_t> users;
  for (const Run& run : runs) users.push_back(step.users[run.first]);
  std::sort(users.begin(), users.end());
  return std::adjacent_find(users.begin(), users.end()) == users.end();
}

int64_t segments_of(int64_t positions) { return (positions + glm::SEGMENT - 1) / glm::SEGMENT; }

// What a run sees, or a segment of it.
struct Part {
  Run run;
  int64_t begin, end;        // positions
  int64_t positions;         // of all parts of the run
  int64_t run_number = -1;   // among the divided runs
  int64_t first_result = 0;  // among those of divided runs

  bool is_divided() const { return run_number >= 0; }
  // Whether a token is computed by several threads. Those that see one segment are not, also beside others.
  bool divides(const Step& step, int64_t t) const { return is_divided() && step.visible[t] > glm::SEGMENT; }
  bool is_last() const { return end == positions; }
  int64_t segments() const { return segments_of(positions); }
};

// Runs whose segments are computed by several threads. The one that completes the last segment merges them.
class Divided {
 public:
  // Divides a run.
  void divide(const Step& step, const Run& run, int64_t positions, std::vector<Part>& parts) {
    for (int64_t begin = 0; begin < positions; begin += glm::SEGMENT)
      parts.push_back({run, begin, std::min<int64_t>(positions, begin + glm::SEGMENT), positions, runs,
                       results});
    results += segments_of(positions) * (run.last - run.first) * step.group * step.kv_heads;
    ++runs;
  }

  // After all runs were divided.
  void begin(const Step& step, const std::vector<Part>& parts) {
    if (runs == 0) return;
    head_dim = step.head_dim, kv_heads = step.kv_heads, group = step.group;
    contexts.reset(new float[results * head_dim]);
    sums.reset(new glm::SoftmaxSum[results]);
    left.reset(new std::atomic<int64_t>[runs * kv_heads]);
    for (const Part& part : parts)
      for (int64_t head = 0; part.is_divided() && head < kv_heads; ++head)
        left[part.run_number * kv_heads + head] = part.segments();
  }

  // Of one query head of a token.
  float* context(const Part& part, int64_t t, int64_t head) {
    return contexts.get() + result(part, t, head) * head_dim;
  }
  glm::SoftmaxSum* sum(const Part& part, int64_t t, int64_t head) {
    return sums.get() + result(part, t, head);
  }

  // After one key head of a part.
  void complete(const Step& step, Part part, int64_t kv_head) {
    if (left[part.run_number * kv_heads + kv_head].fetch_sub(1) > 1) return;
    part.begin = 0;
    for (int64_t t = part.run.first; t < part.run.last; ++t)
      for (int64_t head = kv_head * group; part.divides(step, t) && head < (kv_head + 1) * group; ++head)
        glm::level().merge_segments(context(part, t, head), sum(part, t, head),
                                    segments_of(step.visible[t]), head_dim, step.context(t, head));
  }

 private:
  int64_t runs = 0, results = 0, head_dim = 0, kv_heads = 0, group = 0;
  std::unique_ptr<float[]> contexts;             // by run, token, query head and segment
  std::unique_ptr<glm::SoftmaxSum[]> sums;       // the same
  std::unique_ptr<std::atomic<int64_t>[]> left;  // number of segments, by run and key head

  int64_t result(const Part& part, int64_t t, int64_t head) const {
    const int64_t row = (t - part.run.first) * kv_heads * group + head;
    return part.first_result + row * part.segments() + part.begin / glm::SEGMENT;
  }
};

// Divides what a run sees if it would keep a thread busy for too large a part of the step.
std::vector<Part> parts_of(const Step& step, const std::vector<Run>& runs, Divided& divided) {
  const auto positions_of = [&](const Run& run) -> int64_t {
    return *std::max_element(step.visible + run.first, step.visible + run.last);
  };
  const auto cost_of = [&](const Run& run) { return positions_of(run) * (run.last - run.first); };
  int64_t cost = 0;
  for (const Run& run : runs) cost += cost_of(run);
  std::vector<Part> parts;
  for (const Run& run : runs) {
    const int64_t positions = positions_of(run);
    const bool is_large = PIECES * glm::threads() * cost_of(run) > step.kv_heads * cost;
    if (is_large && positions > glm::SEGMENT) {
      divided.divide(step, run, positions, parts);
    } else {
      parts.push_back({run, 0, positions, positions});
    }
  }
  divided.begin(step, parts);
  return parts;
}

}  // namespace
