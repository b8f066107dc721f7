"""Convert text to tokens: tokenizers, vocabularies, token streams."""
