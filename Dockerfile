# Images of Elastipod: `docker build --target operator .`, and for training `--target agent .` and `--target training .`.
# `elastipod local` carries out these same steps without a container engine. To keep a change of code cheap, everything
# that changes rarely (Debian packages, dependencies) stands before the code, and the code is one thin layer at the end.

# A release names the digest of the moment: --build-arg DEBIAN=debian:bookworm-slim@sha256:... (.ci/release.yaml).
ARG DEBIAN=debian:bookworm-slim

FROM ${DEBIAN} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb \
    && ln -sf python3 /usr/bin/python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV PATH=/opt/elastipod/code/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# Tools that build and install; nothing of them enters an image. Bytecode is compiled here,
# because images are read-only and run as users who could not write it.
FROM base AS tools
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir uv "setuptools>=77" wheel
WORKDIR /src

FROM tools AS operator-dependencies
COPY requirements/operator.txt /src/
RUN /opt/tools/bin/uv pip install --no-cache --compile-bytecode --python /usr/bin/python3 --target /opt/elastipod/operator \
    --require-hashes --requirements operator.txt \
    && rm /opt/elastipod/operator/.lock

# The training image's own PyTorch. Empty where the environment is mounted at run time, as on the local cluster.
FROM tools AS train-dependencies
ARG TRAIN_REQUIREMENTS=train.txt
COPY requirements/train.txt /src/
RUN mkdir -p /opt/elastipod/site-packages \
    && if [ -n "$TRAIN_REQUIREMENTS" ]; then \
         /opt/tools/bin/uv pip install --no-cache --compile-bytecode --python /usr/bin/python3 --target /opt/elastipod/site-packages \
           --require-hashes --requirements "$TRAIN_REQUIREMENTS"; \
       fi
# For training images with more in them: --build-arg EXTRAS="transformers lightning" --build-arg PACKAGES=datasets
ARG EXTRAS=
ARG PACKAGES=
COPY pyproject.toml /src/
RUN if [ -n "$EXTRAS$PACKAGES" ]; then \
      /opt/tools/bin/uv pip install --no-cache --compile-bytecode --python /usr/bin/python3 --target /opt/elastipod/site-packages \
        ${EXTRAS:+--requirements pyproject.toml $(printf -- '--extra %s ' $EXTRAS)} $PACKAGES; \
    fi

FROM tools AS code
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
COPY agent /src/agent
COPY localcluster /src/localcluster
RUN /opt/tools/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/tools/bin/uv pip install --no-cache --offline --no-deps --compile-bytecode --python /usr/bin/python3 \
       --target /opt/elastipod/code /wheels/*.whl \
    && rm /opt/elastipod/code/.lock

# The slim wheel: what a user's own image needs beside its torch.
FROM tools AS agent-code
COPY agent /src/agent
COPY LICENSE /src/agent/
RUN /opt/tools/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels /src/agent \
    && /opt/tools/bin/uv pip install --no-cache --offline --no-deps --compile-bytecode --python /usr/bin/python3 \
       --target /opt/elastipod/code /wheels/*.whl \
    && rm /opt/elastipod/code/.lock

FROM base AS operator
RUN printf '/opt/elastipod/code\n/opt/elastipod/operator\n' > /usr/lib/python3/dist-packages/elastipod.pth
COPY --from=operator-dependencies /opt/elastipod/operator /opt/elastipod/operator
COPY --from=code /opt/elastipod/code /opt/elastipod/code
WORKDIR /
USER 65532:65532
ENTRYPOINT ["elastipod", "operator"]

# A base for images with a torch of their own, or a place to take the wheel from:
# COPY --from=elastipod/agent /wheels /wheels
FROM base AS agent
RUN printf '/opt/elastipod/code\n' > /usr/lib/python3/dist-packages/elastipod.pth \
    && mkdir /workspace && chown 65532:65532 /workspace
COPY --from=agent-code /wheels /wheels
COPY --from=agent-code /opt/elastipod/code /opt/elastipod/code
# Users without an entry in /etc/passwd have a name for programs that ask for one.
ENV HOME=/workspace USER=elastipod
WORKDIR /workspace
USER 65532:65532
CMD ["hyperpodrun", "--help"]

# Runs as root on the local cluster, whose shared folder belongs to root.
FROM base AS train
RUN printf '/opt/elastipod/code\n/opt/elastipod/site-packages\n' > /usr/lib/python3/dist-packages/elastipod.pth
COPY --from=train-dependencies /opt/elastipod/site-packages /opt/elastipod/site-packages
COPY --from=code /opt/elastipod/code /opt/elastipod/code
COPY examples /opt/elastipod/examples
WORKDIR /workspace
CMD ["python3"]

# The published image for training.
FROM train AS training
RUN chown 65532:65532 /workspace
ENV HOME=/workspace USER=elastipod
USER 65532:65532
