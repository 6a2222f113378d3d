"""Tests of GPU workers: with real GPUs where there are any, and everywhere with a stand-in."""
