"""What a project that talks to a model writes, as the README has it; tests/test_testing.py runs it."""

from openai import OpenAI


def test_the_client_streams(tokenteller_server):
    client = OpenAI(base_url=tokenteller_server.base_url, api_key="unused")
    chunks = client.completions.create(
        model=tokenteller_server.model, prompt="To be", max_tokens=8, temperature=0, stream=True
    )
    assert len([chunk for chunk in chunks if chunk.choices[0].text]) > 1
