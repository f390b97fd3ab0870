"""Callbacks that measure, report and save."""
