from __future__ import annotations

from tests.integration.aio.conftest import _no_producer_is_left as _no_producer_is_left
from tests.integration.aio.conftest import broker as broker
from tests.integration.aio.conftest import certificate as certificate
from tests.integration.aio.conftest import make_broker as make_broker
from tests.integration.aio.conftest import proxy as proxy
from tests.integration.aio.conftest import pytest_generate_tests as pytest_generate_tests
from tests.integration.aio.conftest import pytest_pycollect_makeitem as pytest_pycollect_makeitem
from tests.integration.aio.conftest import pytest_pyfunc_call as pytest_pyfunc_call
from tests.integration.aio.conftest import run as run
from tests.integration.aio.conftest import stack as stack
from tests.integration.aio.conftest import wire as wire
