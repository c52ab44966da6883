"""OpenMP reads its settings when torch is imported, which test modules do before anything of ours."""

import kernels.environment  # noqa: F401
