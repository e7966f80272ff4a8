import json
from pathlib import Path

import numpy as np

from astraflow import wire
from astraflow.dataflow.api import ROUTES
from astraflow.dataflow.service.ingest import PolicyLimits, check_results
from astraflow.dataflow.service.openapi import openapi_document, openapi_json
from astraflow.types import (
    Episode,
    EpisodeResult,
    EpisodeResults,
    LeaseRequest,
    PolicyInfo,
    Sampling,
    Trajectory,
)

DOCS = Path(__file__).parents[4] / "docs"


def test_the_published_document_is_up_to_date() -> None:
    published = (DOCS / "openapi.json").read_bytes()
    assert published == openapi_json(), (
        "run: python -m astraflow.dataflow.service.openapi > docs/openapi.json"
    )


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document()
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(document["components"]["schemas"])
    assert {"Trajectory", "LeaseReply", "BatchReply", "ErrorReply"} <= names


def test_every_route_is_in_the_document_and_in_the_protocol_page() -> None:
    document, page = openapi_document(), (DOCS / "protocol" / "routes.md").read_text(encoding="utf-8")
    for route in ROUTES:
        path = route.path.replace(":int", "")
        assert document["paths"][path][route.method.lower()]["operationId"] == route.name
        assert f"{route.method} {path}" in page


def test_the_worked_example_of_the_protocol_page_is_the_trajectory_that_it_says() -> None:
    page = (DOCS / "protocol" / "index.md").read_text(encoding="utf-8")
    text = page.split("## Token columns")[1].split("```json\n")[1].split("```")[0]
    trajectory = wire.decode(text.encode(), Trajectory, wire.JSON)
    assert wire.array(trajectory.token_ids, "int32").tolist() == [5, 6, 7, 8, 2]
    assert wire.array(trajectory.mask, "uint8").tolist() == [0, 0, 0, 1, 1]
    logprobs = wire.array(trajectory.behavior_logprobs, "float32")
    assert np.allclose(logprobs, [0, 0, 0, -0.7, -0.1])
    policy = PolicyInfo(name="actor", is_trained=True, sampling=Sampling(), max_lag=1)
    episode = Episode(trajectories=(trajectory,), score=1.0)
    result = EpisodeResult(lease_id="17.3.0", outcome=episode)
    limits = {"actor": PolicyLimits(policy, 4, 9)}
    assert check_results((result,), policies=limits, hosts=("actor",)) == {}


def test_the_examples_of_requests_decode() -> None:
    page = (DOCS / "protocol" / "routes.md").read_text(encoding="utf-8")
    for heading, item in (("POST /v1/leases", LeaseRequest), ("POST /v1/episodes", EpisodeResults)):
        text = page.split(f"### {heading}")[1].split("```json\n")[1].split("```")[0]
        assert wire.decode(text.encode(), item, wire.JSON)
