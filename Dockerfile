# docker build -t parallel-gpt2 .
# docker run --rm --shm-size 1g -v "$PWD/workdir:/app/workdir" parallel-gpt2 --world_size 2
# docker run --rm --gpus all --shm-size 1g -v "$PWD/workdir:/app/workdir" parallel-gpt2
#
# On the package index, torch for Linux is built with CUDA; it also runs on CPUs. The CPU-only build
# is gigabytes smaller: --build-arg CPU_INDEX=URL, with the URL that pytorch.org names for "CPU".
FROM python:3.11-slim
ARG CPU_INDEX=
WORKDIR /app
COPY requirements.txt ./
RUN if [ -n "$CPU_INDEX" ]; then \
        pip install --no-cache-dir --index-url "$CPU_INDEX" "$(grep '^torch==' requirements.txt)"; \
    fi && pip install --no-cache-dir -r requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps -e .
ENTRYPOINT ["python", "project/run_data_parallel.py"]
