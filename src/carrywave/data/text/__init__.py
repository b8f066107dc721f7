"""Text as tokens: tokenizers, vocabularies, one long stream."""
