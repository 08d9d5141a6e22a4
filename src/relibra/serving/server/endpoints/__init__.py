"""Endpoints: what their bodies may hold, and the form of their answers, whole and as streams of events."""
