"""Has Spark's daemons for Python workers load the package once, before they fork: each worker would take half a second.

It is on the path of the session of `conftest.py` only. The cluster, Spark Connect's client and the examples load the
package in each worker, as users do.
"""

from __future__ import annotations

import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    import qflow_client.spark.datasource  # noqa: F401  # loading it is the purpose
