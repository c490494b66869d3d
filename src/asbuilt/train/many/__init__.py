"""Training by many processes, on PyTorch's engine: torchrun, FSDP2, DTensor, distributed checkpoints.

The processes of a run see the same recipe and the same folder, on a disk that they share. Each reads its share of the
same global batch, so the number of processes changes a run's losses by rounding alone.
"""
