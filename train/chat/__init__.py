"""Dialogues with models behind OpenAI-compatible chat endpoints."""
