from benchmarks.harness.app import main

raise SystemExit(main())
