#!/usr/bin/env bash
# The speed records of a GPU: kedge beside the plain eager loop and pfl, in one process per line.
#   PYTHONPATH=src bash bench/gpu_speed.sh FOLDER [pfl|pfl_bf16|small10|small100|resnet_bn|resnet_gn ...]
# pfl 0.6.0 must be importable (pip install pfl==0.6.0) for its column. About 12 minutes in all, most
# of them for compiling; a line that is interrupted (Ctrl-C, timeout -s INT) keeps what it has.
set -u
out=$1; shift
names=${*:-pfl pfl_bf16 small10 small100 resnet_bn resnet_gn}
mkdir -p "$out"
fused="vector(compile=true)"
bench() { timeout -s INT "${LIMIT:-300}" python3 -m kedge bench --device cuda "$@"; }
for name in $names; do
    file=$out/speed_h200_$name.json
    case $name in
    pfl) bench pfl --against eager,pfl --engines "$fused" --precisions tf32 \
        --methods fedavg,scaffold,fedprox --rounds 5 --out "$file" ;;
    pfl_bf16) bench pfl --against eager,pfl --engines "$fused" --precisions bf16 \
        --methods fedavg,scaffold,fedprox --rounds 5 --out "$file" ;;
    small10 | small100) bench "$name" --engines "$fused" --precisions tf32 \
        --methods fedavg,scaffold,fedprox --rounds 3 --warm 1 --out "$file" ;;
    resnet_bn) bench resnet_bn --engines "loop(compile=true),$fused" --precisions tf32,bf16 \
        --rounds 3 --warm 1 --out "$file" ;;
    resnet_gn) bench resnet_gn --engines "$fused,loop(compile=true,streams=4)" \
        --precisions tf32,bf16 --rounds 3 --warm 1 --out "$file" ;;
    esac
done
