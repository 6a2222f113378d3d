"""What GPU workers need, without a GPU; and the stand-in for CuPy and NCCL."""
