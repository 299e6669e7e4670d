timeout 75 python3 trial28/time.py 2>&1
for f in v02_overlap2 v05_overlap1; do
echo "NCU $f"
timeout 20 ncu --clock-control none -k regex:attention_kernel --launch-skip 1 -c 1 --section SpeedOfLight --section ComputeWorkloadAnalysis --section WarpStateStats --section SchedulerStats --section LaunchStats --section MemoryWorkloadAnalysis --metrics sm__inst_executed_pipe_tensor.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active python3 trial28/one.py trial28/variants/$f.cu 2>&1 | tail -130
done
timeout 25 python3 -m gpt2_infer verify attention_kernels/csrc/fp32/v28_wgmma.cu --device cuda --quick --no-timing 2>&1 | tail -15
