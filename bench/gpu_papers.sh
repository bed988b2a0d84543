#!/usr/bin/env bash
# Run rows of tables side by side on one GPU; their records come back in one small archive.
#   OUT=FOLDER bash bench/gpu_papers.sh MINUTES JOB [JOB ...]
# A JOB is TABLE:ROWS or TABLE:ROWS:SEEDS, e.g. fedbr/small_mnist:fedavg,fedbr:0,1,2. Each is a process with a
# results folder of its own, and stops by itself after MINUTES. Every 15 seconds OUT/records.tgz is written
# anew with what is there so far: records, and what they are collected from if all is killed. Afterwards:
#   bash bench/gpu_papers.sh merge OUT/records.tgz docs/results
# Packed datasets are read from carry/ (carry/tools/datasets.py, carry/data/NAME.0.npz) if it is there, else
# from $KEDGE_DATA; DATASETS names those to unpack. For a trial: DEVICE=cpu ROUNDS=2. MPS=0: without CUDA's MPS.
set -u
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=4
python=${PYTHON:-python3}
minutes=$1; shift
work=$(mktemp -d)
if [ "$minutes" = merge ]; then
    tar xzf "$1" -C "$work" || exit 1
    for table in "$work"/job*/.runs/*/*; do
        name=${table##*/.runs/} job=${table%/.runs/*}
        "$python" -m kedge reproduce "$name" --show --results "$job" >/dev/null # collects the records
        echo "${job##*/} $name: $("$python" -m kedge reproduce "$name" --merge "$job" --results "$2" 2>&1 >/dev/null)"
    done
    exit
fi
echo "$(date +%T) start: $# jobs of at most $minutes minutes"
if [ -f carry/tools/datasets.py ]; then # read once by each job
    "$python" carry/tools/datasets.py unpack "$work/data" ${DATASETS:-} || exit 1
    export KEDGE_DATA=$work/data
fi
pack() {
    (cd "$work" && find job* -type f ! -name '*.safetensors' ! -name bundle.json ! -name clients.json |
        tar czf "$OUT/records.new" -T - 2>/dev/null)
    mv "$OUT/records.new" "$OUT/records.tgz"
}
if [ "${DEVICE:=cuda}" = cuda ] && [ "${MPS:-1}" = 1 ] && nvidia-cuda-mps-control -d 2>/dev/null; then
    trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1' EXIT # kernels of several processes at once
    if ! timeout 40 "$python" -c "import torch; torch.ones(1).cuda().item()"; then
        echo quit | nvidia-cuda-mps-control
        trap - EXIT
    fi
fi
number=0
for job in "$@"; do
    IFS=: read -r table rows seeds <<<"$job"
    folder=$work/job$((number += 1))
    mkdir -p "$folder"
    timeout -s INT -k 15 "$(awk "BEGIN{print int(60*$minutes+40)}")" "$python" -m kedge reproduce "$table" \
        ${rows:+--rows "$rows"} ${seeds:+--seeds "$seeds"} ${ROUNDS:+--rounds "$ROUNDS"} --device "$DEVICE" \
        --minutes "$minutes" --results "$folder" --no-report >"$folder/log" 2>&1 &
done
while [ -n "$(jobs -rp)" ]; do
    sleep 15
    pack
done
pack
number=0
for job in "$@"; do
    folder=$work/job$((number += 1))
    echo "== $job"
    grep -H '"rounds_done"' "$folder"/*/*/*.json 2>/dev/null | sed 's|.*/\(.*\).json:.*: \(.*\),|\1 \2 rounds|'
    grep -aiE "error|not |memory" "$folder/log" | grep -v GB | tail -n 3 | cut -c1-300
done
echo "$(date +%T) done"
