module qflow/interop/suite

go 1.20
