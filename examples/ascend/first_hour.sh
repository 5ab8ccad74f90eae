#!/usr/bin/env bash
# The first hour with a card: checks, demo, speed and memory, in one archive for a report.
#
#     examples/ascend/first_hour.sh [910A|910B]         on a card; default: 910A
#     DEVICE_TARGET=CPU examples/ascend/first_hour.sh   a trial of this script, without a card
#
# Environment variables: USERS, of bench, default 1,2,4,8; CHECKPOINT, a folder to check, measure and
# plan instead of the small model; OUT, where the archive goes, default the current folder.
#
# A step that fails does not stop the rest. The archive has no prompts, no answers, no weights, and of
# the environment only the variables named below. It ends with 1 if a step failed.
set -u

card="${1:-910A}"
target="${DEVICE_TARGET:-Ascend}"
users="${USERS:-1,2,4,8}"
out="${OUT:-.}"
name="glm-multiuser-$target-$(date +%Y%m%d-%H%M%S)"
work="$(mktemp -d)"
report="$work/$name"
mkdir -p "$report" "$out" || exit 1
failed=0

of_checkpoint=()
[ -z "${CHECKPOINT:-}" ] || of_checkpoint=(--checkpoint "$CHECKPOINT")

# step NAME COMMAND...: its output in NAME.txt, then its seconds and exit code in steps.tsv.
step() {
    local step="$1" begun="$SECONDS" code
    shift
    printf '%-12s ... ' "$step"
    "$@" > "$report/$step.txt" 2>&1 < /dev/null
    code=$?
    printf '%s\t%s\t%s s\n' "$step" "$code" "$((SECONDS - begun))" >> "$report/steps.tsv"
    if [ "$code" -eq 0 ]; then
        printf 'ok, %s s\n' "$((SECONDS - begun))"
    else
        failed=1
        printf 'exit code %s, see %s.txt\n' "$code" "$step"
    fi
}

# The same with the card's memory and load every five seconds beside it.
watched() {
    local sampler=""
    if command -v npu-smi > /dev/null; then
        : > "$report/$1.npu-smi.txt"  # there even if the step ends before the sampler begins
        { while :; do date +%T; npu-smi info; sleep 5; done; } > "$report/$1.npu-smi.txt" 2>&1 &
        sampler=$!
    fi
    step "$@"
    [ -z "$sampler" ] || { kill "$sampler"; wait "$sampler"; } 2> /dev/null
}

# shellcheck disable=SC2317  # `step` calls it
environment() {
    uname -srm
    python --version
    glm-multiuser --version
    local variable
    for variable in ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_RT_VISIBLE_DEVICES DEVICE_ID GLOG_v \
        ASCEND_GLOBAL_LOG_LEVEL MS_ENABLE_GE OMP_NUM_THREADS GLM_MULTIUSER_THREADS; do
        echo "$variable=${!variable-(not set)}"
    done
    cat /usr/local/Ascend/driver/version.info "${ASCEND_HOME_PATH:-}"/version.cfg 2> /dev/null
    return 0
}

# The summary behind the answers: how many are those given alone, and how fast.
# shellcheck disable=SC2317
demo() {
    glm-multiuser demo --device-target "$target" --users 4 > "$work/demo.txt" 2> "$work/demo.err"
    local code=$?
    grep -A 4 -E '^[0-9]+ of [0-9]+ answers are identical' "$work/demo.txt"
    [ "$code" -eq 0 ] || grep -E '^[A-Za-z]*(Error|error)' "$work/demo.err"
    return "$code"
}

step environment environment
if command -v npu-smi > /dev/null; then
    step npu-smi npu-smi info
else
    echo "npu-smi      ... not there: nothing about the card's memory is in the report"
fi
step run-check python -c "
import mindspore
mindspore.set_device('$target', 0)
mindspore.run_check()"
watched selfcheck glm-multiuser selfcheck --device-target "$target" ${of_checkpoint[@]+"${of_checkpoint[@]}"}
watched demo demo
watched bench glm-multiuser bench --device-target "$target" --users "$users" \
    --json "$report/bench.json" --plot "$report/bench.png" ${of_checkpoint[@]+"${of_checkpoint[@]}"}
# Graphs are compiled and kept, and then loaded: the checks have to hold again, in less time.
for start in start start-again; do
    step "$start" glm-multiuser selfcheck --device-target "$target" --compile-cache-dir "$work/graphs"
done
step plan glm-multiuser plan --model "${CHECKPOINT:-chatglm-6b}" --device "$card"

# Paths name people. In some containers the home is /, which begins every path.
home="${HOME:-}"
home="${home%/}"
sed -i -e "s#$work#(temporary)#g" -e "s#${home:-/nowhere}#~#g" "$report"/*.txt "$report"/*.json \
    2> /dev/null
tar -czf "$out/$name.tar.gz" -C "$work" "$name" || {
    echo "the archive cannot be written; what would be in it is in $report" >&2
    exit 1
}
rm -rf "$work"

cat <<END

$out/$name.tar.gz has everything. What to look at:

  run-check    fails: MindSpore and CANN do not fit each other; nothing below means anything
  selfcheck    "golden logits" or "known answers": an operator computes something else than on a CPU;
               "isolation": please report it, whatever else there is
  demo         the line "... answers are identical" has to name all of them
  bench        late compiles must be 0; tok/s of all users together should grow with the users
  start-again  with the graphs that "start" has kept: the same checks, in fewer seconds
  plan         beside what npu-smi showed during bench: how far is the estimate off?

docs/ascend.md says what each failure would mean, and how to report it.
END
exit "$failed"
