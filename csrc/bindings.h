// Shared by the files that make up pyfast._C.
#pragma once
#include <pybind11/pybind11.h>

#include "kernels.h"

extern const pyfast::Kernels* g_kernels;  // the table of the current instruction set (bindings.cpp)

void bind_attention(pybind11::module_& m);
void bind_moe(pybind11::module_& m);
void bind_row_map(pybind11::module_& m);
void bind_route(pybind11::module_& m);
