"""Tokenizers of prompts."""
