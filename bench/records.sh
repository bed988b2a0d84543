#!/usr/bin/env bash
# The runs behind docs/results: each headline method and its baseline on the same partitions, cohorts
# and initial weights, with three seeds. Needs $KEDGE_DATA with fashion_mnist, mnist and organamnist.
# Results go to the folder $1, one run per line, in parallel; $2 selects a group of runs.
set -u
out=$1; group=${2:-all}
mkdir -p "$out"
run() {  # name, then the options of kedge run
    local name=$1; shift
    python3 -m kedge run --out "$out/$name" "$@" >"$out/$name.log" 2>&1 || tail -3 "$out/$name.log" &
}
cog="--data fashion_mnist --partition label_shards(2) --clients 10 --model fedcog_cnn --rounds 70
     --steps 400 --batch 64 --lr 0.01 --momentum 0.9 --weight-decay 1e-5"
br="--data mnist --partition client_dirichlet_sequential(0.1)+rotation(15) --clients 10
    --model fedcog_cnn --rounds 150 --steps 50 --batch 64 --lr 0.01 --replacement --eval-every 5
    --angles 0,15,30,45,60,75,90,105,120,135 --weighting uniform"
boost="--data fashion_mnist --partition client_dirichlet_balanced(0.1) --clients 100 --per-round 10
       --model lenet5 --rounds 60 --steps 50 --batch 50 --lr 0.1 --weight-decay 1e-3 --clip 10
       --schedule exponential(0.998) --weighting uniform"
tr="--data organamnist --split pooled(0.4,0.3) --partition paired_class_dirichlet(0.1) --clients 20
    --model lenet5 --batchnorm batch --rounds 120 --steps 37 --batch 32 --lr 0.01 --target 85"
# the records of FLBoost are those of KL(teacher || student) for both players, its former default
kl="direction=teacher_student,labels=allotted,final_norm=true"
if [ "$group" = all ] || [ "$group" = first ]; then
    run cog-fedavg $cog --method fedavg
    run cog-fedcog $cog --method "fedcog(start=50)"
    run cog-fedimpro $cog --method fedimpro
    run br-fedavg $br --method fedavg
    run br-fedbr $br --method fedbr:mnist
    run boost-scaffold $boost --method scaffold
    run boost-flboost $boost --method "scaffold+flboost:paper($kl)"
    run boost-flboost-mean $boost --method "scaffold+flboost:paper($kl,class_mean=true)"
    wait
fi
if [ "$group" = all ] || [ "$group" = second ]; then
    run tr-fedavg $tr --method fedavg
    run tr-fedtr $tr --method fedtr
    run tr-centroids $tr --method "fedtr(drift_rule=none)"
    run tr-descent $tr --method "fedtr(drift_rule=descent)"
    wait
fi
if [ "$group" = all ] || [ "$group" = third ]; then
    longer="${br/--rounds 150/--rounds 400} --seeds 0,1"
    longer="${longer/--eval-every 5/--eval-every 10}"
    run br400-fedavg $longer --method fedavg
    run br400-fedbr $longer --method fedbr:mnist
    run br400-fedbr01 $longer --method "fedbr(lam=0.1,rows=64)"
    run boost-fedavg $boost --seeds 0,1 --method fedavg
    run boost-on-fedavg $boost --seeds 0,1 --method "flboost:paper($kl,lr=0.01)"
    run boost-lr $boost --seeds 0,1 --method "scaffold+flboost:paper($kl,lr=0.01)"
    run boost-lr-mean $boost --seeds 0,1 --method "scaffold+flboost:paper($kl,lr=0.01,class_mean=true)"
    run boost-lr-frozen $boost --seeds 0,1 --method "scaffold+flboost:paper($kl,student_bn=frozen,lr=0.01)"
    wait
fi
python3 "$(dirname "$0")/gather.py" "$out"
