// Which processors threads are kept on, and how many there are.
#pragma once

#include <string>
#include <vector>

namespace qt {

// The processors (hardware threads) that the process may use, in order, as they were when this was first asked: a thread that
// is kept on one of them later asks for all. Empty where the system does not say.
const std::vector<int>& usable_processors();

// `processors` in the order in which threads are kept on them: one of each core first, in their order, then the cores'
// second ones, and so on. `system`: where sysfs is; a core of which it does not tell has one processor.
std::vector<int> in_order_of_cores(const std::vector<int>& processors, const std::string& system);

// Keeps the calling thread on one processor.
void stay_on(int processor);

}  // namespace qt
