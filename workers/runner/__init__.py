"""Runners. The environment comes first: a runner's module imports torch, and OpenMP reads its settings only once."""

from kernels import environment as environment
