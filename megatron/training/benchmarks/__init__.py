"""Measurements of the pipeline runtime against its simulator and against torch's; the command
line is `tools/benchmark_pipeline.py`.

measure   alternating contestants, common start, accurate sleep
emulated  passes spent asleep inside the real runtime       torch_peer  torch's schedules on the same
compute   a small Llama on the real runtime                 llama       that model, ours and torch's
split     what splitting a layer's backward costs           verdicts    targets, and whether reached
"""
