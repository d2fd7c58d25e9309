"""Loads the package in Spark's daemon before it forks Python workers. Otherwise each worker needs half a second.

Only the session of `conftest.py` has this module on its path. In the cluster, with Spark Connect and in the examples,
each worker loads the package, as for users.
"""

from __future__ import annotations

import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    import qflow_client.spark.datasource  # noqa: F401  # loading it is the purpose
