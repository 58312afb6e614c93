"""The main job: GRPO with an unmodified verl on two CPU ranks, planned by Equipoise, shown live and summed up.

``python -m examples.main_job --help`` says how to run it. ``job`` is the place to start reading.
"""
