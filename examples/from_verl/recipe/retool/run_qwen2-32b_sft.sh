# The settings of verl's script of this name (Apache-2.0), for `treadle sft`: two machines with 8 GPUs.
# Ray starts the ranks: run it once, from examples/from_verl, where the cluster is reached. NNODES=1
# and GPUS say otherwise. Arguments are added at the end, as --dry-run or key=value.
set -x

NNODES=${NNODES:-2}
GPUS=${GPUS:-8}

experiment_name=multiturn-sft-qwen-2.5-32b-instruct
DATA_ROOT=${DATA_ROOT:-$PWD}

# What retool_sft_preprocess.py wrote.
TRAIN_DATA=$DATA_ROOT/dataset/wuxibin/ReTool-SFT/data/train.parquet
EVAL_DATA=$DATA_ROOT/dataset/wuxibin/ReTool-SFT/data/train.parquet
MODEL_PATH=${MODEL_PATH:-$DATA_ROOT/model/Qwen2.5-32B-Instruct}
SAVE_PATH=$DATA_ROOT/checkpoint/$experiment_name

treadle sft \
    data.train_files=$TRAIN_DATA \
    data.val_files=$EVAL_DATA \
    data.max_length=16384 \
    data.train_batch_size=32 \
    data.multiturn.enable=true \
    data.multiturn.messages_key=messages \
    data.multiturn.tools_key=tools \
    data.micro_batch_size_per_gpu=4 \
    model.partial_pretrain=$MODEL_PATH \
    model.strategy=fsdp \
    trainer.default_local_dir=$SAVE_PATH \
    trainer.project_name=wuxibin-multiturn-sft \
    trainer.experiment_name=$experiment_name \
    trainer.n_gpus_per_node=$GPUS \
    trainer.nnodes=$NNODES \
    trainer.logger='["console","wandb"]' \
    trainer.total_epochs=6 \
    ulysses_sequence_parallel_size=4 \
    use_remove_padding=true \
    policy.parallel.tensor=2 \
    policy.recompute=full \
    policy.micro_batch_tokens=4096 \
    "$@"
