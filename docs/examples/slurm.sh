#!/bin/bash
# A run on two hosts under Slurm: one torchrun a host, which starts a process for each of its GPUs.
#
#   sbatch slurm.sh                       in a folder that all hosts see, with ringflash installed for torchrun's Python
#   scancel --signal=TERM --full JOBID    saves and ends; submit it again to go on
#SBATCH --job-name=ringflash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --exclusive
#SBATCH --signal=TERM@60
#SBATCH --requeue
set -euo pipefail

first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0  # if a host has several networks

srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_host:29500" \
  -m ringflash train fit --config two-hosts --ckpt_path last
