"""What people outside can run or take: submissions to benchmarks and reports to other projects."""
