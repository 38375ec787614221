# docker build -t parallel-gpt2 .
# docker run --rm --shm-size 1g -v "$PWD/workdir:/app/workdir" parallel-gpt2 --world_size 2
# docker run --rm --gpus all --shm-size 1g -v "$PWD/workdir:/app/workdir" parallel-gpt2
#
# The package index has torch for Linux built with CUDA, which also runs on CPUs. Its build for CPUs
# alone saves gigabytes: --build-arg CPU_INDEX=URL, the one that pytorch.org names for "CPU".
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
