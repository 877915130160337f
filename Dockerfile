# syntax=docker/dockerfile:1
#
#   docker build -t infernum .                     CPU; about 60 MB above the base
#   docker build -t infernum --build-arg GPU=yes . with NVRTC and cuBLASLt, for NVIDIA GPUs
#
#   docker run -p 8000:8000 infernum                                       the built-in demo model
#   docker run -p 8000:8000 -v /srv/models:/models:ro infernum serve --model /models/qwen3-4b
#   docker run -p 8000:8000 -v models:/var/lib/infernum infernum serve --model Qwen/Qwen3-0.6B   of the hub
#   docker run --gpus all …                                                 needs nvidia-container-toolkit
#
# Options can also be set in the environment (INFERNUM_API_KEY_FILE=/run/secrets/keys), or in a file:
#   -v ./infernum.toml:/etc/infernum.toml:ro … serve --config /etc/infernum.toml
ARG GPU=no
ARG RUST=1.95

FROM rust:${RUST}-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin infernum \
 && install -D target/release/infernum /out/infernum \
 && /out/infernum generate --max-tokens 8 "Once upon a time"

# CUDA's libraries, without the toolkit: the two that are needed, where the engine looks for them. The
# driver's own comes from the host.
FROM build AS cuda-no
RUN mkdir -p /cuda/lib64

FROM python:3.13-slim-bookworm AS cuda-yes
RUN pip install --no-cache-dir --no-deps --target /wheels nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.0.2.14 \
 && mkdir -p /cuda/lib64 \
 && find /wheels -name 'libnvrtc*.so*' ! -name '*.alt.so*' -exec cp -t /cuda/lib64 {} + \
 && find /wheels -name 'libcublasLt.so*' -exec cp -t /cuda/lib64 {} + \
 && ls /cuda/lib64/libnvrtc.so.13 /cuda/lib64/libcublasLt.so.13

FROM cuda-${GPU} AS cuda

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="Infernum" \
      org.opencontainers.image.description="An LLM inference engine built like a compiler" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
# The home is where compiled kernels and downloaded models are kept; mount it to keep them longer than the container.
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/infernum --shell /usr/sbin/nologin infernum
COPY --from=cuda /cuda/lib64/ /usr/local/cuda/lib64/
COPY --from=build /out/infernum /usr/local/bin/infernum
# Which parts of the driver the container toolkit brings in; without a GPU nobody reads these.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    XDG_CACHE_HOME=/var/lib/infernum/cache \
    INFERNUM_HOST=0.0.0.0 \
    INFERNUM_PORT=8000
USER 10001:10001
WORKDIR /var/lib/infernum
VOLUME /var/lib/infernum
EXPOSE 8000
# SIGTERM drains: what runs is finished before the process ends. Give it longer than docker's 10 s
# (--stop-timeout 45) where answers are long.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s --start-interval=1s --retries=3 \
    CMD ["infernum", "health"]
ENTRYPOINT ["infernum"]
CMD ["serve"]
