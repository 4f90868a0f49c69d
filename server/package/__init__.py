"""The package's top: `tokenteller.testing`, beside `tokenteller.model` and `tokenteller.server`."""
