"""Serves a deployment inside an existing Ray cluster, as a job.

    ray job submit --working-dir . -- python ray_jobs/serve.py [CONFIG|MODEL] [options of `headrace serve`]

The job's process is the launcher: ending the job drains and ends the deployment.
"""

from __future__ import annotations

import sys

from headrace.cli import app

if __name__ == "__main__":
    app(["serve", *sys.argv[1:], "--backend", "ray", "--ray-address", "auto"], prog_name="serve.py")
