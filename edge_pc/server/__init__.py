"""A server of OpenAI's API on one engine, and a page for people.

Requests are read and laid out in threads of their own (`app.py`, `asking.py`). One thread computes (`scheduler.py`): it
decodes all answers together, and keeps the contexts of finished ones for conversations that go on (`warm.py`).
"""
