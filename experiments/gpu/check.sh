#!/usr/bin/env bash
# What changes on a GPU: noise between it and the CPU and between its attention kernels, verifier parity, speeds.
# Under 8 minutes on one GPU. Where there is none it says so and ends with 0.
#
#   experiments/gpu/check.sh [folder for results, default experiments/gpu/results]
set -euo pipefail
cd "$(dirname "$0")/../.."
RUN="${PYTHON:-.venv/bin/python}"
[ -x "$RUN" ] || RUN=python3
OUT="${1:-experiments/gpu/results}"
MODEL=models/SmolLM2-135M-Instruct
if ! "$RUN" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "skipped: torch sees no CUDA or ROCm device here"
    exit 0
fi
[ -f "$MODEL/config.json" ] || "$RUN" -m refimpl.model.prepare
timeout 460 "$RUN" -m experiments.gpu.check --into "$OUT" --model "$MODEL"
