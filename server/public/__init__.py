"""`import tokenteller`: `tokenteller.testing`, and the rooms as `tokenteller.model` and `tokenteller.server`."""
