"""Corpora, tasks, tokenizers, token shards and windows."""
