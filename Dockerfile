# syntax=docker/dockerfile:1
#
#   docker build --tag faena .
#
# The image contains the binary, the root certificates and nothing else: no shell, no package manager. For jobs that start programs
# (shell.run, [[pool]]) build it on an image that has them, and the root certificates:
#
#   docker build --tag faena --build-arg RUNTIME=node:22-bookworm .
ARG RUNTIME=gcr.io/distroless/cc-debian12:nonroot

FROM rust:1.95.0-slim-bookworm AS build
WORKDIR /source
COPY . .
# The caches speed up the next build and are not part of the image.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/source/target \
    cargo build --profile dist --locked --package faena-server \
    && install -D target/dist/faena /image/usr/local/bin/faena \
    && install -d -m 0700 -o 65532 -g 65532 /image/var/lib/faena

# hadolint ignore=DL3006
FROM ${RUNTIME}
LABEL org.opencontainers.image.title="faena" \
    org.opencontainers.image.description="Durable job server" \
    org.opencontainers.image.licenses="MIT OR Apache-2.0"
COPY --from=build /image /
# A container is reached through its network, which needs an API key in the database: the server says so if there is none.
ENV HOST=0.0.0.0 \
    PORT=3000 \
    DATABASE_URL=sqlite:/var/lib/faena/faena.db \
    FAENA_LOG_FORMAT=json
# The current folder is where faena.toml is looked for.
WORKDIR /etc/faena
VOLUME ["/var/lib/faena"]
EXPOSE 3000 3001
USER 65532:65532
# Fails only if the process does not answer. A database that is down is no reason to restart a server.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["/usr/local/bin/faena", "health", "--live"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/faena"]
CMD ["serve"]
