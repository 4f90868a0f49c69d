"""What a project that talks to a model writes; tests/test_testing.py runs it."""

from __future__ import annotations

from openai import OpenAI

from tokenteller.testing import RunningServer


def test_the_client_streams(tokenteller_server: RunningServer) -> None:
    client = OpenAI(base_url=tokenteller_server.base_url, api_key="unused")
    chunks = client.completions.create(
        model=tokenteller_server.model, prompt="To be", max_tokens=8, temperature=0, stream=True
    )
    assert len([chunk for chunk in chunks if chunk.choices[0].text]) > 1
