#!/bin/bash
# A training job on YARN whose hosts have no sparkdl: an environment is packed once and sent to the executors.
# Usage: submit.sh job.yaml [KEY=VALUE ...]
set -euo pipefail

archive="${ARCHIVE:-environment.tar.gz}"
wheel="${WHEEL:-sparkdl-torch}" # or the path of a wheel of `make wheel`
if [ ! -f "$archive" ]; then
  python3 -m venv environment
  environment/bin/pip install "$wheel[train,mlflow]" venv-pack
  environment/bin/venv-pack -p environment -o "$archive"
fi

# The archive has no interpreter: the hosts need this Python at this path.
exec spark-submit \
  --master yarn \
  --deploy-mode client \
  --archives "$archive#environment" \
  --conf spark.pyspark.python=./environment/bin/python \
  --conf spark.pyspark.driver.python=environment/bin/python \
  --conf spark.dynamicAllocation.enabled=false \
  --conf "spark.executor.instances=${EXECUTORS:-2}" \
  --conf "spark.executor.cores=${CORES:-4}" \
  --conf "spark.executor.memory=${MEMORY:-4g}" \
  --conf "spark.executor.memoryOverhead=${OVERHEAD:-8g}" \
  "$(environment/bin/sparkdl job-script)" "$@"
