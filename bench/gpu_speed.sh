#!/usr/bin/env bash
# The speed records of a GPU: kedge beside the plain eager loop and pfl, in one process per line.
#   PYTHONPATH=src bash bench/gpu_speed.sh FOLDER [NAME ...]
# pfl 0.6.0 must be importable (pip install pfl==0.6.0) for its column. About a quarter of an hour in
# all, most of it for compiling: a minute for each of a ResNet's methods. A line takes LIMIT seconds at
# most (300); one that is interrupted keeps what it has, which is nothing before all are warm.
set -u
out=$1; shift
[ $# -gt 0 ] || set -- pfl small10 small100 resnet_{bn,gn}_{bf16,tf32} streams
mkdir -p "$out"
fused="vector(compile=true)"
bench() { timeout -s INT "${LIMIT:-300}" python3 -m kedge bench --device cuda "$@"; }
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
