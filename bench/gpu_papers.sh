#!/usr/bin/env bash
# Run rows of tables side by side on one GPU; their records come back in one small archive.
#   OUT=FOLDER bash bench/gpu_papers.sh MINUTES JOB [JOB ...]
# A JOB is TABLE:ROWS or TABLE:ROWS:SEEDS, e.g. fedbr/small_mnist:fedavg,fedbr:0,1,2. Each is a process of
# its own with its own results folder, and stops by itself after MINUTES. Every 15 seconds OUT/records.tgz is
# written anew, with what is there so far: records, and of runs that are not done the files that a record is
# collected from. So nothing is lost if all is killed. In the repository, afterwards:
#   bash bench/gpu_papers.sh merge OUT/records.tgz docs/results
# Packed datasets are read from carry/ (carry/tools/datasets.py, carry/data/NAME.0.npz) where it exists, else
# from $KEDGE_DATA. DEVICE=cpu and ROUNDS=2 are for a trial.
set -u
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=4
python=${PYTHON:-python3}
if [ "$1" = merge ]; then
    folder=$(mktemp -d) && tar xzf "$2" -C "$folder" || exit 1
    for job in "$folder"/job*; do
        (cd "$job" && find . -path ./.runs -prune -o -name table -print >/dev/null)
        for table in "$job"/.runs/*/*; do
            name=${table#"$job"/.runs/}
            "$python" -m kedge reproduce "$name" --show --results "$job" >/dev/null  # collects
            "$python" -m kedge reproduce "$name" --merge "$job" --results "$3" | tail -n +1
        done
    done
    exit
fi
minutes=$1; shift
work=$(mktemp -d)
echo "$(date +%T) start: $# jobs of at most $minutes minutes, in $work"
if [ -f carry/tools/datasets.py ]; then
    "$python" carry/tools/datasets.py unpack "$work/data" ${DATASETS:-} || exit 1
    export KEDGE_DATA=$work/data
fi
pack() {
    (cd "$work" && find job* -name '*.json' -o -name '*.toml' -o -name '*.jsonl' -o -name 'partition*' -o -name log |
        tar czf "$OUT/records.new" -T - 2>/dev/null)
    mv "$OUT/records.new" "$OUT/records.tgz"
}
mps() { echo quit | nvidia-cuda-mps-control >/dev/null 2>&1; }
if [ "${DEVICE:=cuda}" = cuda ] && nvidia-cuda-mps-control -d 2>/dev/null; then # kernels of several processes at once
    trap mps EXIT
    timeout 30 "$python" -c "import torch; torch.ones(1).cuda().item()" && echo "with MPS" || { mps; trap - EXIT; }
fi
number=0 jobs=()
for job in "$@"; do
    IFS=: read -r table rows seeds <<<"$job"
    folder=$work/job$((number += 1))
    mkdir -p "$folder"
    timeout -s INT -k 15 "$(awk "BEGIN{print 60*$minutes+45}")" "$python" -m kedge reproduce "$table" ${rows:+--rows "$rows"} \
        ${seeds:+--seeds "$seeds"} ${ROUNDS:+--rounds "$ROUNDS"} --device "$DEVICE" --minutes "$minutes" \
        --results "$folder" --no-report >"$folder/log" 2>&1 &
    jobs+=($!)
done
while [ -n "$(jobs -rp)" ]; do
    sleep 15
    pack
done
pack
for folder in "$work"/job*; do
    echo "== ${folder##*/}: $*" | cut -c1-20
    tail -n 25 "$folder/log" | cut -c1-200
done
echo "$(date +%T) done"
