"""Every figure of docs/speed.md in one table: `make bench`."""

from __future__ import annotations

import alignment
import memory
import precision
import predict
import update_cost
import views
from table import run

import source

if __name__ == "__main__":
    run(*(module.measure for module in (alignment, update_cost, views, predict, source, memory, precision)))
