"""Corpora, tokenizers, token shards and windows."""
