"""`pd-grpc bench`: what preparing costs, measured over real processes."""
