"""Plans, pools and steps: running a profiled flow."""

from flowlib.runtime.batch import Batch
from flowlib.runtime.contexts import RunContext
from flowlib.runtime.plan import Plan, StepOutput
from flowlib.runtime.pool import KVStore, PagedPool

__all__ = ["Batch", "KVStore", "PagedPool", "Plan", "RunContext", "StepOutput"]
