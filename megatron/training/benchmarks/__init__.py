"""Measurements of the pipeline runtime against its simulator and against torch's.

`tools/benchmark_pipeline.py` is their command line. Run on the ranks:

    measure     contestants in turns, common start, accurate sleep
    emulated    passes spent asleep inside the real runtime
    steps       the same with optimizer steps, back to back
    compute     a small Llama on the real runtime
    split       what splitting a layer's backward costs
    torch_peer  torch's schedules        llama  the small model, ours and torch's

and in the process that started them:

    command_line  the flags
    reports     from times to rows of figures      verdicts  targets, and whether reached
    step_reports  the same for `steps`
"""
