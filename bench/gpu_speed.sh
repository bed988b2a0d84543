#!/usr/bin/env bash
# Write the speed records of a GPU: kedge beside the eager PyTorch loop and pfl, one record per NAME.
#   PYTHONPATH=src:. bash bench/gpu_speed.sh FOLDER [NAME ...]
# The pfl column needs pfl 0.6.0 (pip install pfl==0.6.0). All records take about 15 minutes, most of
# it compilation: about a minute for each method of a ResNet. Each record has a timeout of LIMIT seconds
# (default 300). A record that reaches it keeps the rounds timed so far: none before the warm-up ends.
set -u
out=$1; shift
[ $# -gt 0 ] || set -- pfl small10 small100 resnet_{bn,gn}_{bf16,tf32} streams
mkdir -p "$out"
fused="vector(compile=true)"
bench() { timeout -s INT "${LIMIT:-300}" python3 -m bench --device cuda "$@"; }
for name in "$@"; do
    file=$out/speed_h200_$name.json methods=fedavg,scaffold,fedprox
    case $name in
    pfl) bench pfl --against eager,pfl --engines "$fused" --precisions tf32,bf16 \
        --methods $methods --rounds 5 --out "$file" ;;
    small10 | small100) bench "$name" --engines "$fused" --precisions tf32 --methods $methods \
        --rounds 3 --warm 1 --out "$file" ;;
    resnet_bn_bf16 | resnet_bn_tf32) engine="loop(compile=true,streams=4)" ;;&
    resnet_gn_bf16 | resnet_gn_tf32) engine=$fused ;;&
    resnet_??_tf32) methods=fedavg ;;&
    resnet_??_????) bench "${name%_*}" --engines "$engine" --precisions "${name##*_}" \
        --methods $methods --rounds 3 --warm 1 --out "$file" ;;
    streams) bench resnet_bn resnet_gn --against none --precisions bf16,tf32 --rounds 3 --warm 1 \
        --engines "loop,loop(streams=2),loop(streams=4),loop(streams=8)" --out "$file" ;;
    esac
done
