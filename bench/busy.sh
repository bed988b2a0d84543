#!/usr/bin/env bash
# Run a command while two other processes keep two cores busy:
#   bash bench/busy.sh kedge run --method scaffold --rounds 3 --seeds 0 --out runs/busy
python=${PYTHON:-python3}
"$python" -c "while True: pass" & first=$!
"$python" -c "while True: pass" & second=$!
trap 'kill $first $second' EXIT
"$@"
