for f in attention_kernels/csrc/fp32/v2[89]_*.cu; do
timeout 25 python3 -m gpt2_infer verify $f --device cuda --quick --no-timing 2>&1 | tail -12
done
timeout 60 python3 trial28/time.py 2>&1
for f in v09_turns3_q v06_halves_overlap; do
echo "NCU $f"
timeout 20 ncu --clock-control none -k regex:attention_kernel --launch-skip 1 -c 1 --section SpeedOfLight --section SchedulerStats --section WarpStateStats --metrics sm__inst_executed_pipe_tensor.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio,smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio,smsp__average_warps_issue_stalled_wait_per_issue_active.ratio,smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio,smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio,smsp__average_warps_issue_stalled_dispatch_stall_per_issue_active.ratio python3 trial28/one.py trial28/variants/$f.cu 2>&1 | grep -v "^==" | tail -70
done
