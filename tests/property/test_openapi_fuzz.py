"""The published OpenAPI document against the real app: whatever it allows, and much that it does not, is answered.

schemathesis invents the requests, always the same ones. Each is sent by the four roles' tokens and by nobody's.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig

from astraflow.dataflow.api import ROUTES
from astraflow.dataflow.openapi import openapi_document
from astraflow.dataflow.records import JournalReader
from astraflow.service import MemoryTransport, TokenAuth
from dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, running
